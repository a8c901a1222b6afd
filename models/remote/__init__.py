"""A policy on a server, which may be ours (``rlinf-vla serve``) or another project's.

Read ``options``, ``policy``, ``connection``, then the two kinds of server: ``ours``, ``foreign``.
"""
