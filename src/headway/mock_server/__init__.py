"""An OpenAI-compatible server that computes nothing: the known truth for load generators."""
