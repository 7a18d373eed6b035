"""What filling costs and saves: the count of paper 2.5, and measured time to first token."""
