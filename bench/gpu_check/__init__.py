"""Our engine on a bare machine with torch and transformers: is it right, and how fast is it."""
