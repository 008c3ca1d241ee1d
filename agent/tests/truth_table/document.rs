//! The table in the documentation: rendered from the cases into the page about interception, between two comments.

use std::{collections::BTreeSet, fmt::Write as _, fs};

use crate::{
    case::{Act, Case, How, Outcome, Reach},
    cases,
    check::outcome,
    fixture::Column,
};

const BEGIN: &str = "<!-- begin truth table: written by `WEFT_BLESS=1 cargo test -p weft-agent --test truth_table` -->";
const END: &str = "<!-- end truth table -->";

const PAGE: &str = "../docs/interception.md";

/// Compares the page with the cases. The error names the first difference.
pub(crate) fn check() -> Result<(), String> {
    let (page, table) = (Page::read()?, table());
    if page.table == table { Ok(()) } else { Err(first_difference(&page.table, &table)) }
}

/// Writes the cases into the page.
pub(crate) fn write() -> Result<(), String> {
    let page = Page::read()?;
    fs::write(PAGE, format!("{}{BEGIN}{}{END}{}", page.head, table(), page.tail)).map_err(|error| error.to_string())
}

/// The page about interception: the table and what is around it.
struct Page {
    head: String,
    table: String,
    tail: String,
}

impl Page {
    fn read() -> Result<Self, String> {
        let page = fs::read_to_string(PAGE).map_err(|error| format!("{PAGE}: {error}"))?;
        let (head, rest) = page.split_once(BEGIN).ok_or("the page has no begin of a table")?;
        let (table, tail) = rest.split_once(END).ok_or("the page has no end of a table")?;
        Ok(Self { head: head.to_owned(), table: table.to_owned(), tail: tail.to_owned() })
    }
}

/// Every row of Linkerd's and of Weft's tables must be a case or listed as covered elsewhere, but not both.
pub(crate) fn missing_rows() -> Vec<String> {
    let cases: BTreeSet<&str> = cases::all().flat_map(|case| case.ids).copied().collect();
    let elsewhere: BTreeSet<&str> = cases::ELSEWHERE.iter().flat_map(|row| row.ids).copied().collect();
    let rows = cases::ROWS.iter().flat_map(|(table, last)| (1..=*last).map(move |row| format!("{table}{row}")));
    rows.filter(|row| cases.contains(row.as_str()) == elsewhere.contains(row.as_str())).collect()
}

fn first_difference(shown: &str, table: &str) -> String {
    let mut lines = shown.lines().zip(table.lines());
    let (shown, wanted) = lines.find(|(shown, wanted)| shown != wanted).unwrap_or(("its end", "another"));
    format!("the page differs from the cases; WEFT_BLESS=1 writes it\n  page:  {shown}\n  cases: {wanted}")
}

fn table() -> String {
    let mut text = String::from(
        "\n\n| Row | Traffic | iptables | Weft | Verdict | Why they differ |\n|---|---|---|---|---|---|\n",
    );
    for case in cases::all() {
        let verdicts: Vec<String> = case.verdicts.iter().map(|verdict| code_of(verdict)).collect();
        let [iptables, weft] = Column::ALL.map(|column| words(&outcome(case, column), case));
        let weft = if case.differs.is_some() { format!("**{weft}**") } else { weft };
        let _ = writeln!(
            text,
            "| {} | {} | {iptables} | {weft} | {} | {} |",
            case.ids.join(" "),
            case.what,
            verdicts.join(", "),
            case.differs.map_or("", |difference| difference.reason),
        );
    }
    text.push_str("\n| Row | Traffic | Where it is proven, or why not |\n|---|---|---|\n");
    for row in cases::ELSEWHERE {
        let _ = writeln!(text, "| {} | {} | {} |", row.ids.join(" "), row.what, row.where_);
    }
    text.push('\n');
    text
}

/// Renders `outbound redirect` as the direction and the verdict's label.
fn code_of(verdict: &str) -> String {
    let (direction, label) = verdict.split_once(' ').unwrap_or(("", verdict));
    format!("{direction} `{label}`")
}

fn words(outcome: &Outcome, case: &Case) -> String {
    let reach = match outcome.reach {
        Reach::Outbound => "proxy".into(),
        Reach::Inbound => "proxy, inbound".into(),
        Reach::Direct => "direct".into(),
        // A case without a server only queries its own socket.
        Reach::Seen if matches!(case.act, Act::Dial(How::Fresh)) || case.ids == ["S8"] => "netfilter's error".into(),
        Reach::Seen => "direct".into(),
        Reach::Fails(errno) => format!("`{errno}`"),
    };
    let notable = |name: &str| ["orig", "source", "peername", "same-source"].contains(&name);
    let differs = case.differs.is_some() && case.act != Act::Overflow;
    let seen = outcome.but.iter().filter(|(name, _)| differs && notable(name));
    seen.fold(reach, |text, (name, value)| format!("{text}, {name} `{value}`"))
}
