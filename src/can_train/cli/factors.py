"""stub"""
def factors() -> None:
    pass
