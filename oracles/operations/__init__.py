"""One module an operation of contracts.md."""
