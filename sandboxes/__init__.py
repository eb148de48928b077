"""Sandboxes that fork: one mechanism a file."""
