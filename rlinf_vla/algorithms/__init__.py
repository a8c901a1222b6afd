"""Reinforcement-learning and imitation algorithms: config, loss and one iteration each.

An algorithm is written against a flow protocol and knows nothing of processes or devices.
"""
