import no_such_package_anywhere


class Broken(no_such_package_anywhere.Workload):
    pass
