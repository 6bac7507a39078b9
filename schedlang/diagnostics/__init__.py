"""What is wrong with a program or a plan, and where: data, and its way to people and machines."""
