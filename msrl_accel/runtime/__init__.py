"""Engines that run a policy: one protocol, one module an engine."""
