"""Our engine's rungs, Hugging Face and vLLM on the same work: what each is worth, as ratios."""
