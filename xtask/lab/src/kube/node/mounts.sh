# Makes a new mount namespace what a node has, then holds it open. $0 is the machine's state directory, $1 its data.
set -e
# The kubelet writes kernel settings that no namespace confines. It finds files with the values that it wants in their
# place, and the host's stay as they are.
while read name value; do
    test -e "/proc/sys/$name" || continue
    echo "$value" >"$1/sysctl-$(basename "$name")"
    mount --bind "$1/sysctl-$(basename "$name")" "/proc/sys/$name"
done <<END
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
END
mount -t bpf bpf /sys/fs/bpf
mount --bind "$1" /var/lib
mount --bind "$0/log" /var/log
mount --bind "$0/run" /run
mount --make-rshared /
mkdir -p /run/netns /run/lock
touch /run/mounted
exec sleep infinity
