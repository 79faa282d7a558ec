"""One module a judgement."""
