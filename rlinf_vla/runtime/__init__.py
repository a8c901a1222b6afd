"""Build a recipe's parts and carry out its macro flow, in one process or (`ray/`) on a cluster."""
