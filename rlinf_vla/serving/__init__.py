"""Serve a policy over websockets and HTTP, in the dialects of other projects (docs/serving.md).

May enter: what turns messages into policy calls, safely; no training. Read observations (messages
to observations), service (observations to actions) and batcher (when), then sessions (websockets),
the dialects (openpi, vla_eval, http), app (paths) and server (sockets, signals).
"""
