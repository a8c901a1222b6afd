"""Reward plug-ins: each module implements ``core.protocols.RewardPlugin`` as an entry point.

Functions of observation, actions and step result, without a model of their own: start with
``success``. A learnt reward belongs to its model (``models/compact/classifier.py``).
"""
