"""Any module cut into stages: each stage runs the model's own forward, and of it only its part."""
