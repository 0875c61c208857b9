"""Text tasks with verifiable rewards."""
