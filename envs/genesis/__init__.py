"""Genesis plug-in. The entry point names ``plugin.plugin``."""
