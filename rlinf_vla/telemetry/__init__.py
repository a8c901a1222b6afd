"""What a run reports, and how a computation is measured.

May enter: what reads or shows numbers that others made. Read console, environment, metrics and
timeline (written during a run); page, run_files, charts and control_timing (parts of pages); report
and evaluation_report (the pages); measurement (for the planner and benchmarks).
"""
