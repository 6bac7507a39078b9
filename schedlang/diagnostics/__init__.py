"""What is wrong with a program or a plan, and where: as data, as text and as JSON."""
