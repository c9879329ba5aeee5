"""vLLM as a library behind our host: AsyncLLM, and LLM.generate. Runs in its own environment."""
