"""A local web page about a run, a sweep or a dataset: ``rlinf-vla view``.

``command.py`` listens, ``app.py`` answers requests, ``results.py`` and ``episodes.py`` read what is
in the directory. The pages extend the templates of the reports (``telemetry/templates``).
"""
