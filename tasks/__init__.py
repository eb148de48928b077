"""Task data: one folder a family, read with `importlib.resources.files("agentgym.tasks")`."""
