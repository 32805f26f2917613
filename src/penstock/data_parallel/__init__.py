"""What is done with gradients after the backwards: reduced over replicas, clipped, agreed on."""
