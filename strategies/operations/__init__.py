"""One module an operation: strategies that draw its cases."""
