"""Intake: from documents of any dialect to durable rollouts and grades."""
