"""A campaign: many cases on several subjects, spread over runner processes."""
