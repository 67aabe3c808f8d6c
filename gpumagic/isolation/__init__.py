"""Put back what code may set for the whole process, and hold back what it prints."""
