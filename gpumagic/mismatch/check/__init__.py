"""Check a fix by following devices through the code with the fix in it."""
