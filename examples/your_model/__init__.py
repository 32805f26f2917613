"""Three models that are no Sequential, trained as pipes as they are: see docs/your-model.md."""
