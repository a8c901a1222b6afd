"""What a run reports: console, metrics, timeline and the HTML report."""
