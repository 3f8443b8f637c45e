"""An embedded engine worker: vLLM's dialect on the wire, a GPU's behaviour in time."""
