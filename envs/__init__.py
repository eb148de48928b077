"""Environments: one a file. Each says how an episode starts, what an action does and how the end is scored."""
