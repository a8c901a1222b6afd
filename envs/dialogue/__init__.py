"""Text as a world: dialogues with a verifier. The entry point names ``plugin.plugin``.

Read ``games`` (what is said, and when it is right), ``world``, ``plugin``.
"""
