"""Exported forms of a policy."""
