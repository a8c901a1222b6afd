"""Types, protocols of plug-ins, entry points, atomic files, signals and child processes.

Plug-in packages may import this room and `config`, and nothing else of the engine.
"""
