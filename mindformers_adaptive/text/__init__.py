"""What is written for people: tables, loss scales as powers of two, and files that appear whole or not at all."""
