"""The commands of `kvlingo`: options and errors; what they do is in the package's other modules."""
