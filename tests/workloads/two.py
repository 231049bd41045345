from faults import Faults


class One(Faults):
    pass


class Two(Faults):
    pass
