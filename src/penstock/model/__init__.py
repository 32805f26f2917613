"""From a model to its stages. The README of this folder says in which order to read it."""
