"""Cut a model into stages. The README of this folder says in which order to read it."""
