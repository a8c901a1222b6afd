"""Choose a placement: trace the macro flow, profile its operations, simulate plans.

Reached by the command line only; a run without `cluster.plan=auto` does not import it.
"""
