"""Listeners to a campaign: terminal, plain lines, files."""
