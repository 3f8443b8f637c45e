"""vLLM's dialect: what a request means and what replies look like. No I/O, no state.

Shapes follow recorded replies of a real engine: the same keys in the same order, the same chunks,
the same errors.
"""
