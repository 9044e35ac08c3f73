"""What the parts of the interface share; FlexKV's names."""
