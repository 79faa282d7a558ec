"""Second opinions: the sanitizers of others, on the cases of ours."""
