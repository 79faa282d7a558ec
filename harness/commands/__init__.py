"""What each `pagefuzz` command does, one module a command."""
