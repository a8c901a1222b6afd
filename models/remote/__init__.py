"""A policy on a server, which may be ours (``rlinf-vla serve``) or another project's.

Read ``options``, ``policy``, then the two kinds of server: ``ours``, ``foreign``. Both are reached
over ``features/serving/policy_server.py``.
"""
