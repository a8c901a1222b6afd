"""Genesis plug-in. The entry point names ``plugin.plugin``.

Read ``config``, ``plugin``, ``scene``, ``loading``; then ``simulator``, ``predicates``, ``experts``
and ``world``. Only ``world`` uses Genesis' scenes and robots.
"""
