"""Processes that launch: fork server, worker, and the client that watches them."""
