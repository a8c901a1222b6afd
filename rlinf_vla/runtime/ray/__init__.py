"""The macro flow on Ray: workers that may be lost at any moment, and the trainer."""
