#!/usr/bin/env bash
# A real Slurm of several nodes on one machine, for tests: root is needed, systemd and cgroups are not.
#
#   cluster.sh install        packages by apt (Debian, Ubuntu), about 15 s; does nothing when they are there
#   cluster.sh prepare        the same if it can be done, else a line that says why not: what `make test` calls
#   cluster.sh start | stop   bring it up (about 4 s) or take everything down again, leftovers included
#   cluster.sh status | env   what Slurm says; the line that points a shell's sbatch and squeue at it
#   cluster.sh running        is it? the exit status answers
#   cluster.sh kill-node N    node N loses power: its network goes silent and all its processes are gone
#   cluster.sh start-node N   the node comes back, empty
#
# A node is a network namespace (own address on a bridge), a host name, a process namespace that can be killed as a whole,
# and a /tmp and /dev/shm of its own: what a program wrongly keeps in /tmp is missing on the next node, as in the
# field. Accounting is slurmdbd with a private MariaDB, so that wrong accounts are refused and sacct answers. Every
# daemon keeps its socket, key, data and log below FP8RL_SLURM_DIR: nothing else on the machine is used or changed.
set -euo pipefail

DIR=${FP8RL_SLURM_DIR:-/var/tmp/fp8rl-slurm}  # all state; on every node at this path, as a shared file system is
NODES=${FP8RL_SLURM_NODES:-4}
NET=${FP8RL_SLURM_NET:-10.77.0}               # the login node is .1, node N is .(10+N)
SHARED=${FP8RL_SLURM_SHARED:-}                # directories below /tmp that the nodes share nevertheless
CPUS=8                                        # a node says so; the real cores may be fewer
GPUS=2                                        # devices that exist by name only: enough for Slurm to hand out
BRIDGE=fp8rlbr0
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PACKAGES=(slurmctld slurmd slurm-client slurmdbd slurm-wlm-mysql-plugin munge mariadb-server-core mariadb-client-core
    iproute2 procps util-linux)
export SLURM_CONF=$DIR/etc/slurm.conf
export MYSQL_UNIX_PORT=$DIR/run/mysql.sock
export PATH=$PATH:/usr/sbin:/sbin

fail() { echo "cluster.sh: $*" >&2; exit 1; }

until_true() {  # until_true SECONDS WHAT COMMAND...: wait for COMMAND to succeed, or fail and name WHAT
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$end" ] || fail "$what within its time; logs are in $DIR/log"
        sleep 0.1
    done
}

daemon() {  # daemon NAME COMMAND...: in the background, detached from this shell, with a log and a pid file
    local name=$1
    shift
    setsid "$@" >>"$DIR/log/$name.log" 2>&1 </dev/null &
    echo $! >"$DIR/run/$name.pid"
}

halt() {  # halt NAME: kill a daemon of ours, whose data is thrown away, and wait for its end
    local file=$DIR/run/$1.pid pid
    [ -f "$file" ] || return 0
    pid=$(cat "$file")
    kill -9 "$pid" 2>/dev/null || true
    # Gone, or a zombie that some process 1 takes its time to reap.
    for _ in $(seq 100); do grep -qs '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$pid/status" || break; sleep 0.1; done
    rm -f "$file"
}

installed() {
    local program
    for program in slurmctld slurmd slurmdbd sbatch munged mariadbd mariadb-install-db ip unshare nsenter; do
        command -v "$program" >/dev/null || return 1
    done
}

install() {
    installed && return 0
    [ "$(id -u)" = 0 ] || fail "installing packages needs root"
    command -v apt-get >/dev/null || fail "no apt-get here: install ${PACKAGES[*]} by other means"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${PACKAGES[@]}" >/dev/null
    installed || fail "the packages are installed but programs are missing: is $(command -v slurmctld || echo slurmctld) there?"
}

prepare() {
    if [ "${FP8RL_SLURM_TESTS:-}" != 1 ] || installed; then return 0; fi
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "cluster.sh: no Slurm here, and installing it takes root and apt: its tests are skipped"
        return 0
    fi
    echo "cluster.sh: installing Slurm by apt for tests/slurm"
    (install) || echo "cluster.sh: Slurm could not be installed: its tests are skipped"
}

write_configuration() {
    local i login
    login=$(hostname -s)
    umask 022
    mkdir -p "$DIR"/{etc,run,log,state,shared,mysql}
    : >"$DIR/etc/nodes.conf"
    for i in $(seq "$NODES"); do
        mkdir -p "$DIR/spool/node$i" "$DIR/etc/node$i"
        echo "NodeName=node$i NodeHostname=node$i NodeAddr=$NET.$((10 + i)) CPUs=$CPUS RealMemory=16000 Gres=gpu:$GPUS" \
            >>"$DIR/etc/nodes.conf"
        { echo "127.0.0.1 localhost"; echo "$NET.1 $login"; for j in $(seq "$NODES"); do echo "$NET.$((10 + j)) node$j"; done; } \
            >"$DIR/etc/node$i/hosts"
        # All nodes but the last know themselves by loopback alone, as Debian sets them up.
        [ "$i" = "$NODES" ] || sed -i "s/^.* node$i$/127.0.1.1 node$i/" "$DIR/etc/node$i/hosts"
        # Names come from that file alone: a name server that cannot be reached costs ten seconds a question.
        echo "nameserver 127.0.0.1" >"$DIR/etc/node$i/resolv.conf"
        sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf >"$DIR/etc/node$i/nsswitch.conf"
    done
    echo "NodeName=node[1-$NODES] Name=gpu File=/dev/tty[1-$GPUS]" >"$DIR/etc/gres.conf"
    echo "CgroupPlugin=cgroup/v1" >"$DIR/etc/cgroup.conf"  # slurmd loads one even where nothing uses it
    : >"$DIR/etc/plugstack.conf"
    cat >"$DIR/etc/slurm.conf" <<CONF
ClusterName=ci
SlurmctldHost=$login($NET.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that was requeued waits cred_expire + 1 s before it starts again; the default is two minutes.
AuthInfo=socket=$DIR/run/munge.sock,cred_expire=5
MailProg=/bin/true
MpiDefault=none
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.own.pid
SlurmdPidFile=$DIR/run/slurmd.%n.own.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
PlugStackConfig=$DIR/etc/plugstack.conf
# Neither cgroups nor systemd.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
# Few real cores pass for many; memory is not counted, or a step beside another would wait for it.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
TopologyPlugin=topology/tree
GresTypes=gpu
# Answers within seconds, where a real cluster takes its time.
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
ReturnToService=2
MinJobAge=3600
KillWait=5
CompleteWait=0
SlurmdTimeout=10
MessageTimeout=20
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$NET.1
AccountingStoragePass=$DIR/run/munge.sock
AccountingStorageEnforce=associations
AccountingStorageTRES=gres/gpu
include $DIR/etc/nodes.conf
PartitionName=main Nodes=ALL Default=YES MaxTime=1:00:00 State=UP
PartitionName=short Nodes=ALL MaxTime=2 State=UP
CONF
    # Nodes with odd and with even numbers hang on a switch each, so that the order of names is not that of the network.
    {
        echo "SwitchName=odd Nodes=$(seq -f 'node%g' -s , 1 2 "$NODES")"
        echo "SwitchName=even Nodes=$(seq -f 'node%g' -s , 2 2 "$NODES")"
        echo "SwitchName=spine Switches=odd,even"
    } >"$DIR/etc/topology.conf"
    cat >"$DIR/etc/slurmdbd.conf" <<CONF
DbdHost=$login
DbdAddr=$NET.1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$DIR/run/munge.sock
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
LogFile=$DIR/log/slurmdbd.log
PidFile=$DIR/run/slurmdbd.own.pid
CONF
    chmod 600 "$DIR/etc/slurmdbd.conf"
}

start_network() {
    local i
    ip link add $BRIDGE type bridge
    ip addr add "$NET.1/24" dev $BRIDGE
    ip link set $BRIDGE up
    for i in $(seq "$NODES"); do
        ip netns add "fp8rl-node$i"
        ip link add "fp8rlveth$i" type veth peer name eth0 netns "fp8rl-node$i"
        ip link set "fp8rlveth$i" master $BRIDGE up
        ip -n "fp8rl-node$i" addr add "$NET.$((10 + i))/24" dev eth0
        ip -n "fp8rl-node$i" link set eth0 up
        ip -n "fp8rl-node$i" link set lo up
        ip -n "fp8rl-node$i" route add default via "$NET.1"
    done
}

# Runs as process 1 of the node: sets its files up, then keeps slurmd and reaps what is orphaned.
NODE_PROGRAM='
node=$1 dir=$2 shared=$3
hostname "$node"
for file in hosts resolv.conf nsswitch.conf; do mount --bind "$dir/etc/$node/$file" "$(readlink -f "/etc/$file")"; done
mount -t tmpfs tmpfs /dev/shm
i=0
for each in $shared; do i=$((i + 1)); mkdir -p "/run/fp8rl/$i"; mount --bind "$each" "/run/fp8rl/$i"; done
mount -t tmpfs tmpfs /tmp && chmod 1777 /tmp
i=0
for each in $shared; do i=$((i + 1)); mkdir -p "$each"; mount --move "/run/fp8rl/$i" "$each"; done
slurmd -D -N "$node" & wait'

start_node() {
    local shared=$SHARED
    case $ROOT in /tmp/*) shared+=" $ROOT" ;; esac  # the program that is tested is on a shared file system, wherever
    ip link set "fp8rlveth$1" up
    # nsenter, since `ip netns exec` mounts /sys anew and slurmd then finds no cgroups; and the node dies with its parent.
    daemon "node$1" nsenter "--net=/run/netns/fp8rl-node$1" unshare --uts --pid --mount --fork --kill-child --mount-proc \
        bash -c "$NODE_PROGRAM" node "node$1" "$DIR" "$shared"
}

kill_node() {
    ip link set "fp8rlveth$1" down  # first: its peers get no closed connections, only silence
    halt "node$1"
}

running() {
    local file=$DIR/run/slurmctld.pid
    [ -f "$file" ] && kill -0 "$(cat "$file")" 2>/dev/null
}

all_idle() { [ "$(sinfo -h -N -t idle -p main | wc -l)" = "$NODES" ]; }

start_accounting() {
    # Readable without passwords by those who reach its socket, which root alone does.
    mariadb-install-db --no-defaults --user=root --datadir="$DIR/mysql" --skip-test-db \
        --auth-root-authentication-method=normal >"$DIR/log/mariadb-install.log" 2>&1
    daemon mariadbd mariadbd --no-defaults --user=root --datadir="$DIR/mysql" --socket="$MYSQL_UNIX_PORT" \
        --skip-networking --pid-file="$DIR/run/mariadbd.own.pid" --innodb-flush-log-at-trx-commit=0 \
        --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900
    until_true 30 "MariaDB did not answer" mariadb --no-defaults --socket="$MYSQL_UNIX_PORT" -e "select 1"
    daemon slurmdbd slurmdbd -D
    until_true 30 "slurmdbd did not answer" sacctmgr -n -i list cluster
    sacctmgr -i add cluster ci >/dev/null
    sacctmgr -i add account research Description=tests Organization=tests >/dev/null
    sacctmgr -i add user root Account=research >/dev/null
}

start() {
    local i
    [ "$(id -u)" = 0 ] || fail "namespaces and Slurm's daemons need root"
    installed || fail "programs of Slurm, munge or MariaDB are missing: run $0 install"
    if running; then fail "the cluster in $DIR is running already"; fi
    stop
    rm -rf "$DIR/log"
    write_configuration
    start_network
    dd if=/dev/urandom of="$DIR/etc/munge.key" bs=1024 count=1 status=none
    chmod 400 "$DIR/etc/munge.key"
    daemon munged munged --foreground --force --socket="$DIR/run/munge.sock" --key-file="$DIR/etc/munge.key" \
        --pid-file="$DIR/run/munged.own.pid" --log-file="$DIR/log/munged.log" --seed-file="$DIR/run/munged.seed"
    until_true 10 "munged did not answer" munge --socket="$DIR/run/munge.sock" -n
    start_accounting
    daemon slurmctld slurmctld -D
    until_true 20 "slurmctld did not answer" sinfo
    for i in $(seq "$NODES"); do start_node "$i"; done
    until_true 30 "not all $NODES nodes became idle" all_idle
}

stop() {
    local i name
    for name in $(ip netns list 2>/dev/null | awk '/^fp8rl-node/ {print $1}'); do
        halt "${name#fp8rl-}"
    done
    for name in slurmctld slurmdbd mariadbd munged; do halt $name; done
    for name in $(ip netns list 2>/dev/null | awk '/^fp8rl-node/ {print $1}'); do
        i=${name#fp8rl-node}
        ip link del "fp8rlveth$i" 2>/dev/null || true
        ip netns del "$name"
    done
    ip link del $BRIDGE 2>/dev/null || true
    rm -rf "$DIR"/{etc,run,state,spool,mysql,shared}  # logs stay until the next start
}

case ${1:-} in
    install | prepare | start | stop) "$1" ;;
    running) running ;;
    status) sinfo -N -l && squeue && sacct -X -n | tail -5 ;;
    env) echo "export SLURM_CONF=$SLURM_CONF" ;;
    kill-node | start-node)
        case ${2:-} in [1-9]) "${1/-/_}" "$2" ;; *) fail "$1 needs the number of a node" ;; esac ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed -n 1,8p; exit 2 ;;
esac
