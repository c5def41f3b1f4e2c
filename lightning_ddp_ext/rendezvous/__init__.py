"""How do the ranks find each other?"""
