"""Three models that are not Sequential, trained as pipes without changes: docs/your-model.md."""
